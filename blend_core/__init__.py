"""Planning, admission policies, simulation and engines: what the platform computes, free of any service."""
