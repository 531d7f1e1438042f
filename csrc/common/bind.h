// Helpers of every */bind*.cpp. Python passes pointers as integers; each family of operations has its bind_ function.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

struct CUstream_st;  // *cudaStream_t; bindings of the host part need no CUDA headers

namespace localq {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}
// A field of an operand, by its name in Python; a KeyError where it is missing.
template <typename T>
T field(const pybind11::dict& operand, const char* name) {
  return operand[name].cast<T>();
}
template <typename T>
T* address(const pybind11::dict& operand, const char* name) {
  return pointer<T>(field<uintptr_t>(operand, name));
}

inline CUstream_st* stream_of(uintptr_t address) {
  return reinterpret_cast<CUstream_st*>(address);
}

void bind_nf4(pybind11::module_& m);
void bind_dense(pybind11::module_& m);
void bind_experts(pybind11::module_& m);
void bind_gather(pybind11::module_& m);
void bind_gguf(pybind11::module_& m);
void bind_int4(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_delta(pybind11::module_& m);
void bind_step(pybind11::module_& m);
void bind_scaled(pybind11::module_& m);
void bind_rowlut(pybind11::module_& m);
void bind_vq(pybind11::module_& m);
void bind_bcq(pybind11::module_& m);
void bind_search(pybind11::module_& m);
void bind_search_host(pybind11::module_& m);

}  // namespace localq
