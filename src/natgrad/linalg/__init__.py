"""Pure mathematics on tensors, without modules, ranks or settings.

forms, products, patches, correlation*    symmetric factors: how they are kept and made
symmetric, spd_inverse                    structured matrices in closed form, inverses
lanczos, lobpcg, krylov, conjugate_gradients, matrix_functions, traces, density
                                          iterations that only need products ``x -> A x``
results                                   what these return
"""
