"""The compile counter: every program counts once when it is built or loaded, and counters do not disturb each other."""

import jax
import jax.numpy as jnp

from envace_jax.compile_count import CompileCounter


def test_counters_take_differences_of_what_the_process_compiles():
    counter, x = CompileCounter(), jnp.arange(3.0)
    counter.take()
    function = jax.jit(lambda x: x * 3 + 1)
    function(x)
    later = CompileCounter()
    function(x)  # is there already
    assert counter.take() == 1 and counter.take() == 0
    function(jnp.arange(4.0))  # another shape
    assert later.take() == counter.take() >= 1


def test_a_program_from_the_persistent_cache_counts_too(run_python, tmp_path):
    """It has to be read and loaded while the run waits."""
    code = f"""
        import jax, jax.numpy as jnp
        from envace_jax.compile_count import CompileCounter

        jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        hits = []
        jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hit" in event else None)
        x = jnp.ones(5)
        counter = CompileCounter()
        jax.jit(lambda x: jnp.sin(x) @ x)(x)
        print(counter.take(), len(hits))
    """
    assert run_python(code).split() == ["1", "0"]
    built, hits = run_python(code).split()
    assert built == "1" and int(hits) >= 1
