"""Messages of quire for the protobuf runtime 3.x (from 3.20)."""
