"""What benchmarks/convolution_kernel.py measures: convolutions of stacked clients by Triton kernels."""
