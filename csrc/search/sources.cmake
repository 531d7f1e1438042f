set(HOST beam_search_cpu.cpp bind_host.cpp)
set(LONG beam_search.cu)
set(SHORT adjoint.cu)
set(BINDINGS bind.cpp)
