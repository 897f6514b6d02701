"""A trial of `finish_kernel`'s tiles and passes against the kernel before it."""
