"""APIs of other libraries (Horovod, Keras, TensorFlow), each in a folder of its own, built on the operations of
dadt.api."""
