"""Several replicas behind routers, mixed or with prefill and decode apart."""
