// attention_decode on a CPU: launcher and kernel (tests/kernels/test_attention_emulated.py puts the files together).
#include "facts_on_cpu.h"
#include "common/launch.h"
#include "attention/attention.h"

// What went wrong, or null. backwards: the order in which clusters run.
extern "C" const char* attention_decode_on_cpu(const localq::AttentionStep* step, const localq::KvLayer* layer, int type,
                                               bool clusters, bool backwards) {
  on_cpu::facts = {132, 0, true, clusters};
  on_cpu::backwards = backwards;
  return on_cpu::fault_of(
      [&] { localq::attention_decode(*step, *layer, static_cast<localq::Type>(type), 0, nullptr); });
}

extern "C" int64_t attention_partials_on_cpu(int heads, int kv_heads, int head_dim, int splits) {
  return localq::attention_partials(heads, kv_heads, head_dim, splits);
}
