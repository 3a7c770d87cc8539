"""Which numbers of tokens are measured."""


def get_hybrid_num_tokens_buckets(max_num_tokens: int) -> tuple[int, ...]:
    return (1, max_num_tokens)
