"""Suites by contract: each takes what a plugin brings and raises ContractFailure for what breaks the contract."""
