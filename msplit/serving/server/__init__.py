"""Models behind gRPC and HTTP: TensorFlow Serving's protocol, the Open Inference Protocol (KServe, Triton), health checks, Prometheus.

`config` says what is to be served, `making` makes it ready, `service` has the methods of the protocols, `predict` answers one request;
`rpc` and `rest` are the two ways in, `run` has both listen until they are told to stop. `messages` and `tensors` are what goes over the
wire. TensorFlow is imported by none of them.
"""
