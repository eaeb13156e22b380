"""Where the platform runs: the embedded services of one machine and deployment files."""
