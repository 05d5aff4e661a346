"""The HTTP room: routes, protobuf and JSON, long polls. Knows no torch, no SQL and not the SDK."""
