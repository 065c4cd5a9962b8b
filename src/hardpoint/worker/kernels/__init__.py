"""The compiled CPU kernels: the library, and weights in its packed form."""
