// Attention over a cache of bf16.
#include "attention/attention.h"

template llmbox::Op* llmbox::make_attention<llmbox::BF16>(int, const AttentionCall&);
