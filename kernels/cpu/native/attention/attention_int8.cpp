// Attention over a cache of int8.
#include "attention/attention.h"

template llmbox::Op* llmbox::make_attention<llmbox::INT8>(int, const AttentionCall&);
