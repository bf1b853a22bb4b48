// Launches one specification on any number of devices; safe to use from several threads.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "kernel.h"
#include "spec.h"
#include "status.h"

namespace mosaic_gpu {

// Device memory of an input or output; addresses of an input and an output are equal where the output replaces the input.
struct Buffer {
  void* address;
  uint64_t bytes;
  std::vector<int64_t> shape = {};  // where the caller knows it
};

class Launcher {
 public:
  // `shared`: the cubin is shared with, and stays loaded for, the whole process (see Kernel::Shared).
  static Status Create(std::string_view bytes, bool shared, std::unique_ptr<Launcher>* out);

  // Loads the kernel for the stream's device ahead of the first launch, where graph capture cannot be in the way.
  Status Prepare(CUstream stream);

  // Enqueues the kernel on the stream.
  Status Launch(CUstream stream, const Buffer* buffers, size_t count);

 private:
  using Parameters = std::vector<Parameter>;

  // Encoded maps for one set of buffer addresses and array extents, in the order of the tensor-map parameters.
  struct Maps {
    CUcontext context;
    std::vector<void*> addresses;
    std::vector<uint64_t> dims;
    std::vector<TensorMapImage> images;
  };

  Launcher(Spec spec, std::shared_ptr<Kernel> kernel) : spec_(std::move(spec)), kernel_(std::move(kernel)) {}
  Status Resolve(const Buffer* buffers, size_t count, Parameters* out) const;
  Status CheckBuffers(const Parameters& parameters, const Buffer* buffers, size_t count) const;
  Status EncodedMaps(CUcontext context, const Parameters& parameters, const Buffer* buffers,
                     std::shared_ptr<const Maps>* out);
  Status Encode(size_t index, const TensorMapParameter& map, void* address, TensorMapImage* image) const;
  Status PrepareIn(const StreamContext& context);

  // XLA reuses few sets of addresses at a call site; the bound only keeps a long-lived process from collecting them.
  static constexpr size_t kMaxCachedMaps = 32;

  const Spec spec_;
  const std::shared_ptr<Kernel> kernel_;
  std::mutex mutex_;
  std::vector<CUcontext> prepared_;
  std::list<std::shared_ptr<const Maps>> maps_;  // most recently used first
};

}  // namespace mosaic_gpu
