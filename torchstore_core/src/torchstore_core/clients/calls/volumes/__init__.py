"""Operations on volumes."""
