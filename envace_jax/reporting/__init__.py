"""The report of runs as one page: what stands in their work folders, the charts, and the viewer of trajectories."""
