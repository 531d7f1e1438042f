// Many tokens through a gated delta net, in chunks of 64 on tensor cores: convolution, silu, the rule, norm and gate.
//
// What decode.cu does token by token, turned into products within a chunk (section 3.3 of arXiv 2412.06464). With G the
// sum of the decays g since the start of a chunk and D_ij = exp(G_i - G_j) for j <= i, else 0:
//
//   (I + A) U = beta v,  (I + A) W = beta exp(G) k,  A = beta (k k^T) D below its diagonal
//   written = U - W S;  o = exp(G) q S + (q k^T D) written;  S = exp(G_last) S + k^T (exp(G_last - G) written)
//
// Four kernels, the first three for as many chunks as the workspace has room for, then the next ones:
//   convolve   a thread has 8 channels of 16 tokens; tokens behind the last are zeros, which write and forget nothing
//   prepare    a block for each chunk and value head: k k^T and q k^T, the 16 x 16 blocks on the diagonal of I + A
//              inverted in f32, then a warp has 16 columns of U and 16 of W and substitutes block after block
//   scan       a block for each 64 values of a value head, chunk after chunk; a warp has 16 of them, all alone: their
//              S^T [16, 128] stays in its registers, as sums of one product and operand A of the next. W, q, k and
//              the scores come by cp.async: W and q of the next chunk while S is written, k while S is read
//   gate       a warp for each token and head
// Sums have a fixed order: deterministic, and a pass that is cut between chunks gives the same bits.
//
// Precision. S and all sums are f32. q, k and v are T, as the model rounds them, and so are exact operands: their
// lengths are factors of the products. What is f32 by nature (S, A and its inverse, U, W, scores, what is written) is
// two T, high and low: 16 bits in bf16, 22 in f16 down to 2^-25; the product of two low halves is left out. What o is
// off by is lost in its rounding to T, as in the f32 of torch. With scores in one T, o is off by twice that rounding,
// and by four times where terms cancel (emulated, 200 tokens, decays and betas of all sizes). No half in f16 overflows:
// A, W, the inverse and the scores are at most 1, as I - beta k k^T shortens what it multiplies; S may reach 131,008. G
// is the sum of two f32, so that G_i - G_j is right where a head forgot much before j.
//
// Bound: instructions and latency of the scan, whose chunks follow each other.
#include "delta/check.h"
#include "delta/convolve.cuh"
#include "delta/gate.cuh"
#include "delta/prepare.cuh"
#include "delta/scan.cuh"

namespace localq {

namespace {

constexpr const char* kOp = "delta_prefill";

template <typename T>
void start(const DeltaPass& pass, int device, cudaStream_t stream) {
  using namespace delta;
  const int heads = pass.key_heads * pass.shared, channels = (2 * pass.key_heads + heads) * kDeltaDim;
  const int chunks = (pass.tokens + kChunk - 1) / kChunk;
  for (int first = 0; first < chunks; first += pass.chunks) {
    const Part part = {first * kChunk, chunks - first < pass.chunks ? chunks - first : pass.chunks};
    const int64_t threads = int64_t(channels / kEight) * part.count * (kChunk / kRunTokens);
    launch(kOp, device, delta_convolve_kernel<T>, dim3(unsigned((threads + kConvolveThreads - 1) / kConvolveThreads)),
           dim3(kConvolveThreads), 0, stream, pass, part);
    launch(kOp, device, delta_prepare_kernel<T>, dim3(unsigned(part.count) * heads), dim3(kPrepareThreads),
           sizeof(PrepareShared<T>), stream, pass, part);
    launch(kOp, device, delta_scan_kernel<T>, dim3(unsigned(heads) * kParts), dim3(kScanThreads), sizeof(ScanShared<T>),
           stream, pass, part);
  }
  const int64_t rows = int64_t(pass.tokens) * heads, warps = kGateThreads / 32;
  launch(kOp, device, delta_gate_kernel<T>, dim3(unsigned((rows + warps - 1) / warps)), dim3(kGateThreads), 0, stream,
         pass);
}

}  // namespace

int64_t delta_chunk_bytes(int key_heads, int shared) {
  const int64_t heads = int64_t(key_heads) * shared;
  return (2 * key_heads + heads) * delta::Workspace::kTileBytes + heads * delta::Workspace::kHeadBytes;
}

void delta_prefill(const DeltaPass& pass, Type type, int device, cudaStream_t stream) {
  delta::check_net(pass, type, kOp);
  require(pass.tokens >= 1 && pass.tokens <= 1 << 20, kOp, "tokens", pass.tokens, "must be from 1 to 1048576");
  require(pass.chunks >= 1 && pass.chunks <= 1 << 14, kOp, "chunks", pass.chunks, "must be from 1 to 16384");
  require_aligned(pass.inputs, 16, kOp, "inputs");
  require_aligned(pass.gates, 8, kOp, "gates");
  require_aligned(pass.write, 2, kOp, "write");
  require_aligned(pass.decay, 2, kOp, "decay");
  require_aligned(pass.norm, 8, kOp, "norm");
  require_aligned(pass.columns, 16, kOp, "columns");
  require_aligned(pass.matrix, 4, kOp, "matrix");
  require_aligned(pass.workspace, 16, kOp, "workspace");
  require_aligned(pass.out, 8, kOp, "out");
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) return start<__half>(pass, device, stream);
  start<__nv_bfloat16>(pass, device, stream);
}

}  // namespace localq
