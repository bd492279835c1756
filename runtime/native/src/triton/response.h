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

// Deletes an error that cannot be reported to anyone but the log.
void log_error(TRITONSERVER_Error* error);

// Makes an error of Triton. The statuses of wrong requests become INVALID_ARG.
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

// These functions throw no exceptions, because a request has only one last response.
void send_tensors(TRITONBACKEND_ResponseFactory* factory, const Outputs& outputs,
                  const Tensors& tensors, bool is_last) noexcept;
void send_failure(TRITONBACKEND_ResponseFactory* factory, const Failure& failure) noexcept;

}  // namespace dlm::triton
