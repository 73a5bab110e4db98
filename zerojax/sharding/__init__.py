"""The layout of parameters over the mesh, and their wire formats."""
