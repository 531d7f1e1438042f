// The experts that the device has chosen, in the blocks of a GGUF file, for one token: gate and up, or down with the
// weighted sum, each in one launch. T is f16 or bf16; sums in f32, rounded once. Needs out % 16 == 0. Deterministic:
// every sum has a fixed order and there are no atomics.
//
// As gguf_gemv (gemv.cu) but for what a tile is: the expert's, whose blocks a table on the device says. Products have
// one row of x, in column 0; down has a row for each expert in shared memory. The first copies of gate and up wait for
// the choice; those of down begin while gate and up still run.
//
// Bound: memory. Reads each block of the chosen experts once.
#include <type_traits>

#include "common/check.h"
#include "gguf/block_types.h"
#include "gguf/experts.h"
#include "gguf/experts_launch.h"

namespace localq {
namespace gguf {

extern template bool launch_experts<Q4_0>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                          cudaStream_t);
extern template bool launch_experts<Q4_1>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                          cudaStream_t);
extern template bool launch_experts<Q5_0>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                          cudaStream_t);
extern template bool launch_experts<Q5_1>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                          cudaStream_t);
extern template bool launch_experts<Q8_0>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                          cudaStream_t);
extern template bool launch_experts<IQ4_NL>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                            cudaStream_t);
extern template bool launch_experts<IQ4_NLWithoutTable>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                                        cudaStream_t);
extern template bool launch_experts<Q2_K>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                          cudaStream_t);
extern template bool launch_experts<Q3_K>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                          cudaStream_t);
extern template bool launch_experts<Q4_K>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                          cudaStream_t);
extern template bool launch_experts<Q5_K>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                          cudaStream_t);
extern template bool launch_experts<Q6_K>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                          cudaStream_t);
extern template bool launch_experts<IQ4_XS>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                            cudaStream_t);
extern template bool launch_experts<IQ4_XSWithoutTable>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                                        cudaStream_t);
extern template bool launch_experts<IQ2_XXS>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                             cudaStream_t);
extern template bool launch_experts<IQ2_XS>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                            cudaStream_t);
extern template bool launch_experts<IQ2_S>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                           cudaStream_t);
extern template bool launch_experts<IQ3_XXS>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                             cudaStream_t);
extern template bool launch_experts<IQ3_S>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                           cudaStream_t);
extern template bool launch_experts<IQ1_S>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                           cudaStream_t);
extern template bool launch_experts<IQ1_M>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                           cudaStream_t);
extern template bool launch_experts<TQ1_0>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                           cudaStream_t);
extern template bool launch_experts<TQ2_0>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                           cudaStream_t);
extern template bool launch_experts<NVFP4>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                           cudaStream_t);

}  // namespace gguf

namespace {

using namespace gguf;

using Launcher = bool (*)(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
struct Kernel {
  Launcher launch;
  int columns;  // of a block
};

// Without a table if it has no room beside x.
template <class Of>
bool launch_either(const char* op, ExpertArguments p, uint32_t units, const void* x, void* y, int device,
                   cudaStream_t stream) {
  if (launch_experts<typename Of::Block>(op, p, units, x, y, device, stream)) return true;
  if (std::is_same<typename Of::Block, typename Of::Narrow>::value) return false;
  return launch_experts<typename Of::Narrow>(op, p, units, x, y, device, stream);
}

Kernel kernel_of(GgufType type, const char* op) {
  return of_type(type, op, [](auto of) { return Kernel{launch_either<decltype(of)>, decltype(of)::Block::kColumns}; });
}

ExpertArguments plan(const char* op, const GgufStack& s, const int32_t* chosen, int active, Type type) {
  require(s.experts >= 1 && s.experts <= 1 << 16, op, "experts", s.experts, "must be from 1 to 65536");
  require(active >= 1 && active <= kMostChosen, op, "active", active, "must be from 1 to 16");
  require(s.out >= kTileRows && s.out % kTileRows == 0, op, "out", s.out, "must be a positive multiple of 16");
  require(s.out <= 1 << 24, op, "out", s.out, "is too large");
  require(s.in > 0 && s.in <= 1 << 20, op, "in", s.in, "must be from 1 to 2^20");
  require(type != Type::kFloat32, op, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require_aligned(s.blocks, 8, op, "blocks");
  require_aligned(chosen, 4, op, "chosen");
  if (s.factors != nullptr) require_aligned(s.factors, 4, op, "factors");
  ExpertArguments p = {};
  p.table = s.blocks, p.matrix_factors = s.factors, p.chosen = chosen;
  p.experts = uint32_t(s.experts), p.count = uint32_t(active), p.tiles = uint32_t(s.out / kTileRows);
  p.in = uint32_t(s.in), p.rows = 1, p.bf16 = type == Type::kBFloat16;
  return p;
}

void multiply(const char* op, const ExpertArguments& p, uint32_t units, GgufType of, const void* x, void* y, int device,
              cudaStream_t stream) {
  const Kernel kernel = kernel_of(of, op);
  require(p.in % kernel.columns == 0, op, "in", p.in, "must be a multiple of the columns of a block");
  require_aligned(x, 16, op, "x");
  require_aligned(y, 2, op, "y");
  const DeviceGuard guard(device, op);
  const bool fits = kernel.launch(op, p, units, x, y, device, stream);
  require(fits, op, "in", p.in, "is too large for the shared memory of this card");
}

}  // namespace

void gguf_experts_gate_up(const GgufExpertsGateUp& e, GgufType gate, GgufType up, Type type, int device,
                          cudaStream_t stream) {
  constexpr const char* kOp = "gguf_experts_gate_up";
  require(e.stack.parts == 2, kOp, "parts", e.stack.parts, "must be 2, gate and up");
  ExpertArguments p = plan(kOp, e.stack, e.chosen, e.active, type);
  p.parts = 2;
  p.extras.norm = e.norm, p.extras.norm_weight = e.norm_weight, p.extras.eps = e.eps;
  p.extras.activation = e.activation;
  if (e.norm != NormKind::kNone) require_aligned(e.norm_weight, 2, kOp, "norm_weight");
  if (gate == up) return multiply(kOp, p, p.count * p.tiles, gate, e.x, e.y, device, stream);
  require_aligned(e.gates, 4, kOp, "gates");
  p.parts = 1, p.gates = e.gates;
  multiply(kOp, p, p.count * p.tiles, gate, e.x, e.y, device, stream);
  p.first_part = 1, p.early = true;  // the choice is older than the gates
  multiply(kOp, p, p.count * p.tiles, up, e.x, e.y, device, stream);
}

void gguf_experts_down(const GgufExpertsDown& e, GgufType of, Type type, int device, cudaStream_t stream) {
  constexpr const char* kOp = "gguf_experts_down";
  require(e.stack.parts == 1, kOp, "parts", e.stack.parts, "must be 1");
  require_aligned(e.weights, 4, kOp, "weights");
  ExpertArguments p = plan(kOp, e.stack, e.chosen, e.active, type);
  p.parts = p.count, p.weights = e.weights, p.residual = e.residual, p.early = e.early;
  multiply(kOp, p, p.tiles, of, e.x, e.y, device, stream);
}

}  // namespace localq
