"""Convolutions of stacked clients by Triton kernels, in the place of matrix products of patches: `shape` (a
layer and how it is computed), `blocks` (for which layers that is faster), `use` (when they are used),
`operations` (what vmap, autograd and the compiler know), `memory_order`; `kernels` alone needs Triton."""
