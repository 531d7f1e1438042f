set(HOST bindings.cpp require.cpp)
set(LONG)
set(SHORT check.cpp device.cpp)
set(BINDINGS)
