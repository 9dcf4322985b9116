"""ray: the cluster of RAY_ADDRESS, or a new one here, as 'ray cpus=8 gpus=1'"""
