// Sends responses and errors to Triton.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "triton/core/tritonbackend.h"

namespace dlm::triton {

// Throws an Error if a function of Triton returned an error. Deletes the error.
void check(TRITONSERVER_Error* error);

// Writes an error to Triton's log, and deletes the error. Does nothing if `error` is NULL.
void log_error(TRITONSERVER_Error* error);

// Converts a failure to an error of Triton. If the failure means that the request is invalid, the
// error has the code INVALID_ARG.
TRITONSERVER_Error* error_of(const Failure& failure);

// The output tensors that the client asked for.
struct Outputs {
  bool text = true, output_ids = true, nfe = true, finish = true, prompt_tokens = true,
       completion_tokens = true;
};

// The values of the output tensors of one response.
struct Tensors {
  std::string text;
  std::vector<int32_t> output_ids;
  int32_t nfe = 0;
  std::string finish;
  int32_t prompt_tokens = 0;
  int32_t completion_tokens = 0;
};

// These functions do not throw. If they fail, they write the error to the log.
void send_tensors(TRITONBACKEND_ResponseFactory* factory, const Outputs& outputs,
                  const Tensors& tensors, bool is_last) noexcept;
void send_failure(TRITONBACKEND_ResponseFactory* factory, const Failure& failure) noexcept;

}  // namespace dlm::triton
