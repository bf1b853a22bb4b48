// Success, or a message that starts with the marker by which Python picks the error class ("[ToolchainError] ...").
#pragma once

#include <string>
#include <utility>

namespace mosaic_gpu {

class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status Toolchain(std::string text) { return Status("[ToolchainError] " + std::move(text)); }
  static Status Mismatch(std::string text) { return Status("[DeviceMismatch] " + std::move(text)); }
  static Status Unsupported(std::string text) { return Status("[UnsupportedCall] " + std::move(text)); }
  static Status Launch(std::string text) { return Status("[LaunchError] " + std::move(text)); }

  bool ok() const { return message_.empty(); }
  const std::string& message() const { return message_; }

 private:
  explicit Status(std::string message) : message_(std::move(message)) {}
  std::string message_;
};

}  // namespace mosaic_gpu
