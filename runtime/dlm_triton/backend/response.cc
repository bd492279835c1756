#include "response.h"

#include <cstring>

namespace dlm::triton {
namespace {

// Adds an output tensor with one dimension to a response, and copies its bytes.
void add(TRITONBACKEND_Response* response, const char* name, TRITONSERVER_DataType type,
         int64_t length, const void* bytes, uint64_t size) {
  TRITONBACKEND_Output* output = nullptr;
  check(TRITONBACKEND_ResponseOutput(response, &output, name, type, &length, 1));
  void* buffer = nullptr;
  TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
  int64_t memory_id = 0;
  check(TRITONBACKEND_OutputBuffer(output, &buffer, size, &memory, &memory_id));
  if (memory == TRITONSERVER_MEMORY_GPU)
    fail(DLM_UNSUPPORTED, "output %s is in GPU memory: use host memory", name);
  if (size > 0) std::memcpy(buffer, bytes, size);
}

// Triton stores a string as its size (4 bytes, little-endian), followed by its bytes.
void add(TRITONBACKEND_Response* response, const char* name, const std::string& text) {
  const auto size = static_cast<uint32_t>(text.size());
  std::string bytes(sizeof size, '\0');
  std::memcpy(bytes.data(), &size, sizeof size);
  bytes += text;
  add(response, name, TRITONSERVER_TYPE_BYTES, 1, bytes.data(), bytes.size());
}

void add(TRITONBACKEND_Response* response, const char* name, int32_t value) {
  add(response, name, TRITONSERVER_TYPE_INT32, 1, &value, sizeof value);
}

void add_all(TRITONBACKEND_Response* response, const Outputs& outputs, const Tensors& tensors) {
  if (outputs.text) add(response, "TEXT", tensors.text);
  if (outputs.output_ids)
    add(response, "OUTPUT_IDS", TRITONSERVER_TYPE_INT32,
        static_cast<int64_t>(tensors.output_ids.size()), tensors.output_ids.data(),
        tensors.output_ids.size() * sizeof(int32_t));
  if (outputs.nfe) add(response, "NFE", tensors.nfe);
  if (outputs.finish) add(response, "FINISH", tensors.finish);
  if (outputs.prompt_tokens) add(response, "PROMPT_TOKENS", tensors.prompt_tokens);
  if (outputs.completion_tokens) add(response, "COMPLETION_TOKENS", tensors.completion_tokens);
}

TRITONSERVER_Error_Code code_of(dlm_status status) {
  switch (status) {
    case DLM_INVALID_ARGUMENT:
    case DLM_NOT_FOUND:
    case DLM_UNSUPPORTED:
      return TRITONSERVER_ERROR_INVALID_ARG;
    case DLM_BUSY:
      return TRITONSERVER_ERROR_UNAVAILABLE;
    case DLM_CANCELLED:
      return TRITONSERVER_ERROR_CANCELLED;
    default:
      return TRITONSERVER_ERROR_INTERNAL;
  }
}

}  // namespace

void check(TRITONSERVER_Error* error) {
  if (error == nullptr) return;
  const std::string message = TRITONSERVER_ErrorMessage(error);
  TRITONSERVER_ErrorDelete(error);
  throw Error(DLM_INTERNAL, message);
}

void log_error(TRITONSERVER_Error* error) {
  if (error == nullptr) return;
  TRITONSERVER_Error* const logging = TRITONSERVER_LogMessage(
      TRITONSERVER_LOG_ERROR, __FILE__, __LINE__, TRITONSERVER_ErrorMessage(error));
  if (logging != nullptr) TRITONSERVER_ErrorDelete(logging);
  TRITONSERVER_ErrorDelete(error);
}

TRITONSERVER_Error* error_of(const Failure& failure) {
  return TRITONSERVER_ErrorNew(code_of(failure.status), failure.message.c_str());
}

void send_tensors(TRITONBACKEND_ResponseFactory* factory, const Outputs& outputs,
                  const Tensors& tensors, bool is_last) noexcept {
  TRITONBACKEND_Response* response = nullptr;
  TRITONSERVER_Error* const error = TRITONBACKEND_ResponseNewFromFactory(&response, factory);
  if (error != nullptr) return log_error(error);
  TRITONSERVER_Error* failure = nullptr;
  try {
    add_all(response, outputs, tensors);
  } catch (...) {
    failure = error_of(thrown());
  }
  const uint32_t flags = is_last ? TRITONSERVER_RESPONSE_COMPLETE_FINAL : 0;
  log_error(TRITONBACKEND_ResponseSend(response, flags, failure));
  if (failure != nullptr) TRITONSERVER_ErrorDelete(failure);
}

void send_failure(TRITONBACKEND_ResponseFactory* factory, const Failure& failure) noexcept {
  TRITONBACKEND_Response* response = nullptr;
  TRITONSERVER_Error* const error = TRITONBACKEND_ResponseNewFromFactory(&response, factory);
  if (error != nullptr) return log_error(error);
  TRITONSERVER_Error* const sent = error_of(failure);
  log_error(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, sent));
  TRITONSERVER_ErrorDelete(sent);
}

}  // namespace dlm::triton
