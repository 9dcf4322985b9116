"""postgresql://... for hosts without a common disk; a password that is not in the URL comes from ~/.pgpass"""
