// Attention over a cache of float32.
#include "attention/attention.h"

template llmbox::Op* llmbox::make_attention<llmbox::F32>(int, const AttentionCall&);
