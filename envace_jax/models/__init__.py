"""Language models as pure functions, and their weights in and out of Hugging Face folders.

Only this package imports Flax. The rest of the library sees `types.Policy` and plain pytrees.
"""
