"""The task `gsm_symbolic`: fresh numbers in templates made from GSM8K, in many languages, from a package."""
