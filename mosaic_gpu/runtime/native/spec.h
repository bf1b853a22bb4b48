// A launch specification as made by mosaic_gpu/runtime/launch_spec.py.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "status.h"

namespace mosaic_gpu {

inline constexpr uint32_t kSpecVersion = 3;

// A tensor map over buffer `buffer`: dims in elements, strides and extent in bytes, innermost dimension first.
struct TensorMapParameter {
  uint32_t buffer;
  uint32_t dtype;    // CUtensorMapDataType
  uint32_t rank;
  uint32_t swizzle;  // CUtensorMapSwizzle
  uint64_t extent;   // bytes that the map can reach; the buffer must have as many
  uint64_t dims[5];
  uint64_t strides[5];
  uint32_t box[5];
};

struct PointerParameter {
  uint32_t buffer;
  uint64_t offset;  // bytes
};

struct ScalarParameter {
  uint32_t size;  // bytes, 4 or 8
  alignas(8) unsigned char bytes[8];
};

// A tensor map whose extents are those of the array that a call brings (a program exported with symbols in its shapes).
struct ShapedMapParameter {
  uint32_t buffer;
  uint32_t dtype;
  uint32_t rank;
  uint32_t swizzle;
  uint32_t itemsize;
  struct {
    uint32_t axis;    // of the array
    uint32_t step;    // elements along it
    uint64_t extent;  // 0: as many steps as the array has
  } dims[5];
  uint32_t box[5];
};

// An extent of the array that a call brings, as an int32.
struct ExtentParameter {
  uint32_t buffer;
  uint32_t axis;
};

using Parameter = std::variant<TensorMapParameter, PointerParameter, ScalarParameter, ShapedMapParameter, ExtentParameter>;

struct Spec {
  uint32_t arch;     // compute capability times ten
  char arch_suffix;  // 'a', 'f' or 0
  uint32_t grid[3];
  uint32_t threads;
  uint32_t cluster[3];
  uint32_t shared_bytes;
  uint32_t early;  // 1: it may begin while earlier kernels of the stream run, and waits for them by itself
  std::string toolchain;
  std::string entry;
  std::vector<Parameter> parameters;
  std::string cubin;

  bool empty() const { return grid[0] == 0 || grid[1] == 0 || grid[2] == 0; }
  uint32_t cluster_size() const { return cluster[0] * cluster[1] * cluster[2]; }
};

// Reads `bytes`; whatever they hold, the answer is a spec that is safe to launch or an error.
Status ParseSpec(std::string_view bytes, Spec* spec);

}  // namespace mosaic_gpu
