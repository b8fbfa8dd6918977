// All kernels and the kinds of their arguments (see Op). The files of the kernels document the arguments.
#pragma once

namespace quire {
bool has_tiles();  // whether the processor has AMX and the system permits this process to use it
}

#define QUIRE_OPS \
  OP(pack_rows, "ttiiii") \
  OP(unpack_rows, "tttiiiid") \
  OP(linear, "ttotiiiiiiii" "oooii") \
  OP(low_rank, "tttt" "iiiiiii") \
  OP(quantize_rows, "tttiiiiii") \
  OP(pack_codes, "ttiiiiiiii") \
  OP(unpack_codes, "ttottiiiiiiiiid") \
  OP(code_linear, "tttootiiiiiiiiiiii" "oooii") \
  OP(route, "ttoot" "iiiiiiiiidd") \
  OP(experts, "ttttootoottttt" "iiiiiiiiiiiiiiiiiiiiiii") \
  OP(rms_norm, "tttiiiiiid") \
  OP(add_rms_norm, "tttttiiiid") \
  OP(layer_norm, "ttotiiiiiiid") \
  OP(activate, "ttiiiiii") \
  OP(xielu, "tttii") \
  OP(multiply_add, "tootiiiiiid") \
  OP(concatenate, "tttiiiiii") \
  OP(widen, "ttiii") \
  OP(rotation, "ttttiid") \
  OP(rotate, "ttttiiiiii") \
  OP(embed, "tttiiiid") \
  OP(rotary_write, "ottooottiiiiiiiiiiiii") \
  OP(pack_blocks, "tttiiiiiii") \
  OP(unpack_blocks, "tttiiiiiii") \
  OP(copy_blocks, "ttiiiiiiii") \
  OP(attention_plan, "ttttiii") \
  OP(attention, "tttttttiiiiiiiiiiiiiidd") \
  OP(attention_contiguous, "tttttttiiiiiiiiiiiiiidd") \
  OP(sample, "tttiiiiooooo") \
  OP(logprobs, "ttttttiiiiii") \
  OP(recur, "tttttt" "oooo" "iiiiiiiiiiiiiiii" "dd")
