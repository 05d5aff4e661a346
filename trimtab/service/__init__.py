"""What is true: identity, order, memory. Knows no HTTP, no protobuf and no torch."""
