#include "launcher.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

namespace mosaic_gpu {
namespace {

std::string Hex(const void* address) {
  char text[32];
  std::snprintf(text, sizeof(text), "%p", address);
  return text;
}

std::string Shape(const uint32_t (&extents)[3]) {
  return "(" + std::to_string(extents[0]) + ", " + std::to_string(extents[1]) + ", " + std::to_string(extents[2]) + ")";
}

}  // namespace

Status Launcher::Create(std::string_view bytes, bool shared, std::unique_ptr<Launcher>* out) {
  Spec spec{};
  if (Status status = ParseSpec(bytes, &spec); !status.ok()) return status;
  std::shared_ptr<Kernel> kernel = shared ? Kernel::Shared(spec) : Kernel::Owned();
  out->reset(new Launcher(std::move(spec), std::move(kernel)));
  return Status();
}

Status Launcher::PrepareIn(const StreamContext& context) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(prepared_.begin(), prepared_.end(), context.context()) != prepared_.end()) return Status();
  }
  if (Status status = kernel_->Prepare(spec_, context); !status.ok()) return status;
  std::lock_guard<std::mutex> lock(mutex_);
  prepared_.push_back(context.context());  // twice, if two threads raced: harmless
  return Status();
}

Status Launcher::Prepare(CUstream stream) {
  if (spec_.empty()) return Status();
  StreamContext context(stream);
  if (!context.status().ok()) return context.status();
  return PrepareIn(context);
}

// The parameters of this call: what depends on the arrays' extents gets those that the call brings.
Status Launcher::Resolve(const Buffer* buffers, size_t count, Parameters* out) const {
  *out = spec_.parameters;
  for (size_t i = 0; i < out->size(); ++i) {
    const auto* shaped = std::get_if<ShapedMapParameter>(&(*out)[i]);
    const auto* extent = std::get_if<ExtentParameter>(&(*out)[i]);
    if (shaped == nullptr && extent == nullptr) continue;
    const std::string where = "kernel '" + spec_.entry + "', parameter " + std::to_string(i);
    const uint32_t index = shaped != nullptr ? shaped->buffer : extent->buffer;
    if (index >= count) {
      return Status::Launch(where + " is buffer " + std::to_string(index) + " of a call with " + std::to_string(count));
    }
    const std::vector<int64_t>& shape = buffers[index].shape;
    uint32_t axes = extent != nullptr ? extent->axis + 1 : 0;
    for (uint32_t k = 0; shaped != nullptr && k < shaped->rank; ++k) axes = std::max(axes, shaped->dims[k].axis + 1);
    if (shape.size() < axes) {
      return Status::Launch(where + " needs the extents of buffer " + std::to_string(index) + ", which has " +
                            std::to_string(shape.size()) + " here");
    }
    if (const auto wide = std::find_if(shape.begin(), shape.end(), [](int64_t n) { return n > INT32_MAX; });
        wide != shape.end()) {
      return Status::Unsupported(where + ": an extent of " + std::to_string(*wide) + " is no int32");
    }
    if (extent != nullptr) {
      const auto value = static_cast<int32_t>(shape[extent->axis]);
      ScalarParameter scalar{sizeof(value), {}};
      std::memcpy(scalar.bytes, &value, sizeof(value));
      (*out)[i] = scalar;
      continue;
    }
    TensorMapParameter map{shaped->buffer, shaped->dtype, shaped->rank, shaped->swizzle, shaped->itemsize, {}, {}, {}};
    for (uint32_t k = 0; k < map.rank; ++k) {
      const auto& dim = shaped->dims[k];
      uint64_t stride = uint64_t{shaped->itemsize} * dim.step;
      for (size_t axis = dim.axis + 1; axis < shape.size(); ++axis) stride *= static_cast<uint64_t>(shape[axis]);
      map.dims[k] = dim.extent != 0 ? dim.extent : (static_cast<uint64_t>(shape[dim.axis]) + dim.step - 1) / dim.step;
      map.box[k] = shaped->box[k];
      if (map.dims[k] == 0) {
        return Status::Unsupported(where + ": buffer " + std::to_string(index) + " is empty, which TMA cannot describe");
      }
      if (k == 0) {
        map.extent = map.dims[0] * map.extent;
      } else {
        map.strides[k - 1] = stride;
        map.extent += (map.dims[k] - 1) * stride;
      }
    }
    (*out)[i] = map;
  }
  return Status();
}

Status Launcher::CheckBuffers(const Parameters& parameters, const Buffer* buffers, size_t count) const {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto* map = std::get_if<TensorMapParameter>(&parameters[i]);
    const auto* pointer = std::get_if<PointerParameter>(&parameters[i]);
    if (map == nullptr && pointer == nullptr) continue;
    const uint32_t index = map != nullptr ? map->buffer : pointer->buffer;
    const std::string where = "kernel '" + spec_.entry + "', parameter " + std::to_string(i);
    if (index >= count) {
      return Status::Launch(where + " is buffer " + std::to_string(index) + " of a call with " + std::to_string(count));
    }
    const Buffer& buffer = buffers[index];
    const uint64_t needed = map != nullptr ? map->extent : pointer->offset;
    if (needed > buffer.bytes) {
      return Status::Launch(where + " reaches " + std::to_string(needed) + " bytes into buffer " +
                            std::to_string(index) + ", which has " + std::to_string(buffer.bytes));
    }
    if (map != nullptr && reinterpret_cast<uintptr_t>(buffer.address) % 16 != 0) {
      return Status::Unsupported(where + ": TMA needs arrays that start at a multiple of 16 bytes; buffer " +
                                 std::to_string(index) + " is at " + Hex(buffer.address) +
                                 ". Copy the array, or pass the whole one and slice in the kernel");
    }
  }
  return Status();
}

Status Launcher::Encode(size_t index, const TensorMapParameter& map, void* address, TensorMapImage* image) const {
  constexpr uint32_t kDense[5] = {1, 1, 1, 1, 1};
  const CUresult result = GetDriver().TensorMapEncodeTiled(
      image, static_cast<int>(map.dtype), map.rank, address, map.dims, map.strides, map.box, kDense, kInterleaveNone,
      static_cast<int>(map.swizzle), kPromotion256, kFillZeros);
  if (result == kSuccess) return Status();
  std::string detail = "parameter " + std::to_string(index) + ": dims";
  for (uint32_t i = 0; i < map.rank; ++i) detail += " " + std::to_string(map.dims[i]);
  detail += ", strides";
  for (uint32_t i = 0; i + 1 < map.rank; ++i) detail += " " + std::to_string(map.strides[i]);
  detail += ", box";
  for (uint32_t i = 0; i < map.rank; ++i) detail += " " + std::to_string(map.box[i]);
  detail += ", type " + std::to_string(map.dtype) + ", swizzle " + std::to_string(map.swizzle) + ", at " + Hex(address);
  return DriverFailure("cuTensorMapEncodeTiled", result, spec_, detail);
}

Status Launcher::EncodedMaps(CUcontext context, const Parameters& parameters, const Buffer* buffers,
                             std::shared_ptr<const Maps>* out) {
  auto wanted = std::make_shared<Maps>();
  wanted->context = context;
  for (const Parameter& parameter : parameters) {
    if (const auto* map = std::get_if<TensorMapParameter>(&parameter)) {
      wanted->addresses.push_back(buffers[map->buffer].address);
      wanted->dims.insert(wanted->dims.end(), map->dims, map->dims + map->rank);
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto hit = std::find_if(maps_.begin(), maps_.end(), [&](const auto& entry) {
    return entry->context == context && entry->addresses == wanted->addresses &&
           entry->dims == wanted->dims;
  });
  if (hit != maps_.end()) {
    maps_.splice(maps_.begin(), maps_, hit);
    *out = maps_.front();
    return Status();
  }
  wanted->images.resize(wanted->addresses.size());
  size_t next = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (const auto* map = std::get_if<TensorMapParameter>(&parameters[i])) {
      if (Status status = Encode(i, *map, wanted->addresses[next], &wanted->images[next]); !status.ok()) return status;
      ++next;
    }
  }
  maps_.push_front(wanted);
  if (maps_.size() > kMaxCachedMaps) maps_.pop_back();
  *out = std::move(wanted);
  return Status();
}

Status Launcher::Launch(CUstream stream, const Buffer* buffers, size_t count) {
  if (spec_.empty()) return Status();
  Parameters given;
  if (Status status = Resolve(buffers, count, &given); !status.ok()) return status;
  if (Status status = CheckBuffers(given, buffers, count); !status.ok()) return status;
  StreamContext context(stream);
  if (!context.status().ok()) return context.status();
  if (Status status = PrepareIn(context); !status.ok()) return status;
  std::shared_ptr<const Maps> maps;  // held until the driver has copied them, in case another thread evicts them
  if (Status status = EncodedMaps(context.context(), given, buffers, &maps); !status.ok()) return status;

  // The driver copies parameter values during the call, also while a graph is captured: memory of this call will do.
  std::vector<void*> addresses(given.size());
  std::vector<void*> parameters(given.size());
  size_t next_map = 0;
  for (size_t i = 0; i < given.size(); ++i) {
    if (std::holds_alternative<TensorMapParameter>(given[i])) {
      parameters[i] = const_cast<TensorMapImage*>(&maps->images[next_map++]);
    } else if (const auto* pointer = std::get_if<PointerParameter>(&given[i])) {
      addresses[i] = static_cast<char*>(buffers[pointer->buffer].address) + pointer->offset;
      parameters[i] = &addresses[i];
    } else {
      parameters[i] = const_cast<unsigned char*>(std::get<ScalarParameter>(given[i]).bytes);
    }
  }
  LaunchAttribute attributes[2] = {};
  unsigned attribute_count = 0;
  if (spec_.cluster_size() != 1) {
    attributes[attribute_count].id = kClusterDimension;
    attributes[attribute_count++].value.cluster = {spec_.cluster[0], spec_.cluster[1], spec_.cluster[2]};
  }
  if (spec_.early) {
    attributes[attribute_count].id = kProgrammaticSerialization;
    attributes[attribute_count++].value.programmatic = 1;
  }
  LaunchConfig config{};
  std::copy(std::begin(spec_.grid), std::end(spec_.grid), config.grid);
  config.block[0] = spec_.threads;
  config.block[1] = config.block[2] = 1;
  config.shared_bytes = spec_.shared_bytes;
  config.stream = stream;
  config.attributes = attribute_count != 0 ? attributes : nullptr;
  config.attribute_count = attribute_count;
  const CUresult result = GetDriver().LaunchKernelEx(&config, kernel_->handle(), parameters.data(), nullptr);
  if (result == kSuccess) return Status();
  return DriverFailure("cuLaunchKernelEx", result, spec_,
                       "grid " + Shape(spec_.grid) + ", " + std::to_string(spec_.threads) + " threads, cluster " +
                           Shape(spec_.cluster) + ", " + std::to_string(spec_.shared_bytes) +
                           " bytes of shared memory");
}

}  // namespace mosaic_gpu
