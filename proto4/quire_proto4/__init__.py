"""Messages of quire for the protobuf runtime 4 and later."""
