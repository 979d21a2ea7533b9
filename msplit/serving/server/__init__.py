"""Models behind gRPC and HTTP: TensorFlow Serving's protocol, the Open Inference Protocol (KServe, Triton), health checks, Prometheus.

`config` says what is to be served, `service` has the methods of the protocols and answers requests;
`rpc` and `rest` are the two ways in, `run` makes models ready and has both listen until they are told to stop. `messages` and
`tensors` are what goes over the wire. TensorFlow is imported by none of them.
"""
