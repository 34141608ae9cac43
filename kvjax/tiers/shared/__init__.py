"""A tier that replicas share: units on a store beyond this machine, an object store or Valkey and Redis."""
