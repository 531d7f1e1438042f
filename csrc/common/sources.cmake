set(LONG)
set(SHORT check.cpp device.cpp)
set(BINDINGS bindings.cpp)
