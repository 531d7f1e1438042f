set(LONG beam_search.cu)
set(SHORT adjoint.cu beam_search_cpu.cpp)
set(BINDINGS bind.cpp)
