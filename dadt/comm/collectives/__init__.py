"""Operations on tensors: ordered, by name, over sets of ranks."""
