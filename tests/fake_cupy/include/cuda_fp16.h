// CUDA's 16-bit float, as the C++ compiler has it.
#pragma once
using __half = _Float16;
