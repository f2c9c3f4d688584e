// Attention over a cache of bf16.
#include "attention.h"

template llmbox::Op* llmbox::make_attention<llmbox::BF16>(int, const AttentionCall&);
