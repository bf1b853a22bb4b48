#include "spec.h"

#include <cstring>
#include <type_traits>

namespace mosaic_gpu {
namespace {

// Reads little-endian values off the front of a byte string and remembers whether they were there.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  template <typename T>
  T Value() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    std::string_view bytes = Bytes(sizeof(T));
    if (bytes.size() == sizeof(T)) std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }

  template <typename T>
  void Values(T* out, size_t count) {
    for (size_t i = 0; i < count; ++i) out[i] = Value<T>();
  }

  std::string_view Bytes(uint64_t count) {
    if (count > rest_.size()) {
      good_ = false;
      rest_ = {};
      return {};
    }
    std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }

  bool good() const { return good_; }
  bool at_end() const { return rest_.empty(); }

 private:
  std::string_view rest_;
  bool good_ = true;
};

Status Damaged(const std::string& what) {
  return Status::Launch("damaged launch specification: " + what);
}

Status ReadParameter(Reader& reader, std::vector<Parameter>* out) {
  const std::string where = "parameter " + std::to_string(out->size());
  switch (reader.Value<uint32_t>()) {
    case 0: {
      TensorMapParameter map{};
      map.buffer = reader.Value<uint32_t>();
      map.dtype = reader.Value<uint32_t>();
      map.rank = reader.Value<uint32_t>();
      map.swizzle = reader.Value<uint32_t>();
      map.extent = reader.Value<uint64_t>();
      if (!reader.good()) return Damaged(where + " is cut off");
      if (map.rank < 1 || map.rank > 5) return Damaged(where + " has rank " + std::to_string(map.rank));
      reader.Values(map.dims, map.rank);
      reader.Values(map.strides, map.rank - 1);
      reader.Values(map.box, map.rank);
      out->emplace_back(map);
      break;
    }
    case 1: {
      PointerParameter pointer{};
      pointer.buffer = reader.Value<uint32_t>();
      pointer.offset = reader.Value<uint64_t>();
      out->emplace_back(pointer);
      break;
    }
    case 2: {
      ScalarParameter scalar{};
      scalar.size = reader.Value<uint32_t>();
      reader.Values(scalar.bytes, sizeof(scalar.bytes));
      if (reader.good() && scalar.size != 4 && scalar.size != 8) {
        return Damaged(where + " is a scalar of " + std::to_string(scalar.size) + " bytes");
      }
      out->emplace_back(scalar);
      break;
    }
    case 3: {
      ShapedMapParameter map{};
      map.buffer = reader.Value<uint32_t>();
      map.dtype = reader.Value<uint32_t>();
      map.rank = reader.Value<uint32_t>();
      map.swizzle = reader.Value<uint32_t>();
      map.itemsize = reader.Value<uint32_t>();
      if (!reader.good()) return Damaged(where + " is cut off");
      if (map.rank < 1 || map.rank > 5) return Damaged(where + " has rank " + std::to_string(map.rank));
      for (uint32_t i = 0; i < map.rank; ++i) {
        map.dims[i].axis = reader.Value<uint32_t>();
        map.dims[i].step = reader.Value<uint32_t>();
        map.dims[i].extent = reader.Value<uint64_t>();
        if (reader.good() && map.dims[i].step == 0) return Damaged(where + " has a step of 0");
      }
      reader.Values(map.box, map.rank);
      out->emplace_back(map);
      break;
    }
    case 4: {
      ExtentParameter extent{};
      extent.buffer = reader.Value<uint32_t>();
      extent.axis = reader.Value<uint32_t>();
      out->emplace_back(extent);
      break;
    }
    default:
      return Damaged(where + " is of an unknown kind");
  }
  return reader.good() ? Status() : Damaged(where + " is cut off");
}

}  // namespace

Status ParseSpec(std::string_view bytes, Spec* spec) {
  Reader reader(bytes);
  if (reader.Bytes(4) != "MGLS") return Damaged("it does not start with MGLS");
  const uint32_t version = reader.Value<uint32_t>();
  if (version != kSpecVersion) {
    return Damaged("its version is " + std::to_string(version) + ", this launcher reads version " +
                   std::to_string(kSpecVersion) + "; reinstall mosaic_gpu");
  }
  spec->arch = reader.Value<uint32_t>();
  spec->arch_suffix = static_cast<char>(reader.Value<uint32_t>());
  reader.Values(spec->grid, 3);
  spec->threads = reader.Value<uint32_t>();
  reader.Values(spec->cluster, 3);
  spec->shared_bytes = reader.Value<uint32_t>();
  spec->early = reader.Value<uint32_t>();
  spec->toolchain = reader.Bytes(reader.Value<uint32_t>());
  spec->entry = reader.Bytes(reader.Value<uint32_t>());
  const uint32_t count = reader.Value<uint32_t>();
  // A kernel has at most 32764 bytes of parameters; a larger count is a damaged blob, not a reason to allocate.
  if (!reader.good() || count > 8192) return Damaged("it is cut off or has " + std::to_string(count) + " parameters");
  for (uint32_t i = 0; i < count; ++i) {
    if (Status status = ReadParameter(reader, &spec->parameters); !status.ok()) return status;
  }
  spec->cubin = reader.Bytes(reader.Value<uint64_t>());
  if (!reader.good() || !reader.at_end()) return Damaged("its length does not match its contents");
  if (spec->cubin.empty()) return Damaged("it holds no cubin");
  return Status();
}

}  // namespace mosaic_gpu
