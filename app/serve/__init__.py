"""The graph as Ray Serve runs it: deployments, calls between processes, sets, autoscaling."""
