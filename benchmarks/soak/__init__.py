"""A soak: a run, a sweep and a federation are disturbed again and again, and must end as if nothing had
happened.

    python -m benchmarks.soak                                      # 100 kills and what else there is; under
                                                                   an hour on two quiet cores
    python -m benchmarks.soak --seed 3 --kills 20 --only run sweep
    python -m benchmarks.soak --write docs/reliability.md          # put the record between the markers of
                                                                   that page

Every disturbance is drawn from the seed and printed as it happens. Exit code 1: something was lost, differs,
was left behind or grew."""
