"""`code`: the share of tests that the answer's program passes, in a sandbox. `reward.build` is the grader."""
