"""The preconditioner: three clocks, and what a step must know.

    clocks, settings, step     what is due, hyperparameters at a step, a step as one value
    update                     sums of all ranks -> running averages
    refresh                    running averages -> decomposed factors
    apply, stacks, low_rank    gradients -> preconditioned gradients
    clipping, prediction       trust regions: the KL clip, and damping by Levenberg-Marquardt
    observation                backward passes for a Fisher that is not the empirical one
    inspection, reports        tables of what is covered, kept and sent
    arguments                  errors for arguments that do not fit
    ranks/, state/             several processes, and checkpoints

`natgrad.KFAC` (preconditioner.py) puts these together; its ``step`` is update, refresh, apply.
"""
