"""A small compiled kernel for the steps of decoding on CPUs, built on first use where there is a C compiler."""
