"""Tables of tensors' names: which parts of one tensor are which tensors under other names.

cut      the boxes of a fused or stacked tensor's parts
table    rows read from YAML, and the table of a family of models
"""
