"""Each benchmark prints measured figures beside goals: `python -m benchmarks.step_cost`."""
