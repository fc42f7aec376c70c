"""What a model shows in a forward and backward pass, as sums: the engine of `KFAC` and `operators`.

    discovery    a model -> blocks: one weight matrix each, with the layers that use it
    hooks        a pass -> pairs (input, gradient of the output), one for each call of a layer
    chosen       which samples of a pass enter, and tensors cut down to them
    statistics   pairs -> sums of a block's factors, as its structure says
    averages     sums -> running averages
    blocks       all that is known of one weight: sums, running averages, decomposed factors
    wrappers     compiled models, autocast, GradScaler
    stopwatch    seconds by stage

Nothing in here decides when something is measured, sends anything to other ranks or knows an
optimizer. `kfac/` adds that for training; `operators/structured` runs the same files over a data
set, so that the matrices that are studied are those that precondition.
"""
